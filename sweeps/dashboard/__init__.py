"""optuna-dashboard over a store.

serve            the mirror, in step with a sweep, and its server
mirror           the Optuna study that is shown, made of trials
trials           a study per task, a trial per recipe, as plain data
storages         storages of Optuna's studies
"""
