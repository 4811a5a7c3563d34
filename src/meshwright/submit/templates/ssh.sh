#!/bin/sh
# One host of a run, with an --out that all of them have: meshwright launch RUN.toml --on ssh --hosts A,B
cd {{ folder }} || exit 2
{% for name, value in environment %}
export {{ name }}={{ value }}
{% endfor %}
exec {{ train }}
