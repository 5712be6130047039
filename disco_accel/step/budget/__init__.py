"""Budgets that move while a model trains: grants, plans for other budgets, and the memory that plans share."""
