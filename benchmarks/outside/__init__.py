"""The tests of other projects, without us and with us."""
