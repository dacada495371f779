"""The plan of a conversion: every source tensor, target array and work item accounted for."""
