"""What both planners use: copies in device memory, free lists, the plan in the making and what finishes it."""
