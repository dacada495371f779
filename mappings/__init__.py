"""WHAT goes where: names, named axes, layouts, planning arithmetic. No arrays, no I/O, no Beam."""
