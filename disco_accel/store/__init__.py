"""Memory that processes of one user share: who gets how much of it."""
