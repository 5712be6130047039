"""Devices, compiled libraries, memory that plans point into, ops as the engine reads them."""
