"""Use cases of the control plane, one file per noun. Meets the edge only in `dsec.wire`."""
