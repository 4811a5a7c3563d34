"""Validation of predictions against published and measured runs.

`table` reads rows, of which `infer_model`, `infer_layout` and `infer_program` make `cases`. `metrics` are
the errors, by `error_statistics`, `ranking` those of the order of layouts, `left_out` those on sources
outside of the fit, whose runs `calibration` names, and `page` is the report.
"""
