"""Lower bounds of the step time of one outer choice, from cheap to expensive. All of them but ``chain`` leave resharding out.

``cheap``       any choice                      each layer's best price alone
``bottleneck``  one stage on each device        stages of consecutive layers, memory priced (GRIDS) or exact (``whole_bound``)
``chain``       one stage, or one microbatch    all layers with their resharding, memory priced
``relaxation``  one stage on each device        GLOP: memory and paths of all stages together, stages not contiguous; integer model
``packed``      several stages on each device   whole layers on devices, in any order
``devices``     several stages on each device   the same with exact memory, device by device
``columns``     several stages on each device   column generation over cuts, paths and memory prices
``mixed``       several stages on each device   column generation over devices of whole layers
"""
