"""O13's text of distant XOR: how many passes networks need, by the step that the paper prints and by ours (its Fig. 3).

It has an engine of its own, because a training takes hours and is looked at on its way: `protocol`
says what is done, `cells` does it, `report` puts it into words and a picture.
"""
