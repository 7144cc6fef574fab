"""`sublet gpus`, `ps`, `lease`, `block`, `revoke`, `quarantine`, `warden`."""
