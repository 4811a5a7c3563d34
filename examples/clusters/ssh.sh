#!/bin/sh
# One host of a run, with an --out that all of them have: meshwright launch RUN.toml --on ssh --hosts A,B
cd /shared || exit 2
exec meshwright train /shared/run.toml --out /shared/run --resume auto --doctor --nproc 8 --nodes 2:2
