"""Steps on several host devices beside the ideal."""
