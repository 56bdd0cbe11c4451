"""Studies of several sweeps, of which one chooses what the next trains.

rate_search      every recipe's own learning rate, on seeds that are not reported, then the sweep
confirming       the candidates of a store on fresh seeds; confirm_bound: how many there may be, and their cost
sensitivity      each unit of a model quantized alone and spared alone, then the best choice of those
"""
