"""Why a layout takes what it takes, and why not another.

`explanation` is the whole. `candidate` is a layout that is costed when asked, `neighbours` those that
differ in one thing, `link_load` what crosses each link, `sensitivity` which figure of the hardware
would change the choice, and `alternatives` what besides the layout would be better.
"""
