"""The reference operations in plain torch: correct on every device torch runs on."""
