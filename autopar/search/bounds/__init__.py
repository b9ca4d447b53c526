"""Lower bounds of the step time of one outer choice, from cheap to dear. Every one of them leaves resharding out.

``cheap``       any choice                      each layer's best price alone
``bottleneck``  one stage on each device        stages of consecutive layers, memory priced (GRIDS) or exact (``whole_bound``)
``relaxation``  one stage on each device        GLOP: memory and paths of all stages together, contiguity dropped; its integer model
``packed``      several stages on each device   whole layers on devices, order dropped
``devices``     several stages on each device   the same with exact memory, device by device
``columns``     several stages on each device   column generation over cuts, paths and memory prices
``mixed``       several stages on each device   column generation over devices of whole layers
"""
