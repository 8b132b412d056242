"""Methods of the experiments that have a rule of their own: the others are slow where a test takes all of them."""

from pathspace.experiments.methods import METHODS

# Another method's rule, on another model, from another start, at another rate or for some matrices
# alone.
AS_ANOTHER = {
    "adamw": "adam",
    "path-sgd-half": "path-sgd-short",
    "path-adam-half": "path-adam",
    "g-adam-published": "g-sgd-published",
    "balanced-adamw": "balanced-adam",
    "balanced-soap": "balanced-adam",
    "balanced-muon": "balanced-adam",
    "irnn-adam": "irnn-sgd",
    "irnn-path-sgd-short": "path-sgd-short",
    "irnn-path-sgd-short-both": "path-sgd-short-both",
    "tanh-sgd": "tanh-adam",
    "lstm-sgd": "lstm-adam",
    "ddp-norm-centred": "ddp-norm",
    "moment-norm": "ddp-norm",
    "ddp-sgd-centred": "ddp-sgd",
    "covariance-sgd": "diagonal-natural",
    "np-rnn-sgd": "irnn-sgd",
    "balanced-sgd": "sgd",
    "muon-hidden": "muon",
    "balanced-muon-hidden": "muon",
    "path-muon-hidden": "path-muon",
}
assert METHODS.keys() >= {*AS_ANOTHER, *AS_ANOTHER.values()}
EACH_RULE = [name for name in METHODS if name not in AS_ANOTHER]
