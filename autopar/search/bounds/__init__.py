"""Lower bounds of the step time of one outer choice, from cheap to expensive; they leave resharding out.

``cheap``       each layer's best price alone
``bottleneck``  one stage on each device: stages of consecutive layers, memory priced (GRIDS) or exact (``whole_bound``)
``columns``     column generation in GLOP over cuts, paths through the schedule and prices of memory
"""
