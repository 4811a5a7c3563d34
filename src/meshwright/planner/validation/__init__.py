"""Validation of predictions against published and measured runs.

`table` reads rows, of which `infer_model`, `infer_layout`, `infer_program`, `infer_remat` and `infer_cluster`
make `cases`. `metrics` are the errors, by `error_statistics`, `ranking` those of the order of layouts,
`left_out` those on sources outside of the fit, whose runs `calibration` names, and `page` is the report.
"""
