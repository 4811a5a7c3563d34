"""Why a layout takes what it takes, and why not another."""
