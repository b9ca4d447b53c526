"""Lower bounds of the step time of one configuration, from cheap to expensive. They leave resharding out.

``cheap``       each layer's best price alone
``bottleneck``  one stage on each device: stages of consecutive layers, with a multiplier of memory or with exact memory (``whole_bound``)
``linear``      a linear program over cuts, candidates and paths through the schedule, with rows for integer numbers of layers (``whole``)
"""
