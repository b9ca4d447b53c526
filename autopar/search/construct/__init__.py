"""Solutions of one outer choice: ``stages`` for one stage on each device, ``devices`` for several."""
