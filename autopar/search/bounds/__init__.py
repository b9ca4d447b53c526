"""Lower bounds of the step time of one configuration, from cheap to expensive; they leave resharding out.

``cheap``       each layer's best price alone
``bottleneck``  one stage on each device: stages of consecutive layers, memory priced (GRIDS) or exact (``whole_bound``)
``linear``      a linear program over cuts, paths through the schedule and prices of memory; with ``whole``, of whole layers on each device
"""
