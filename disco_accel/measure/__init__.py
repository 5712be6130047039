"""What ops cost before a plan is made: what they allocate, how long they take, whether they can write in place."""
