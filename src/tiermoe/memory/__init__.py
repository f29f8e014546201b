"""What goes where: the sum of what each owner says it needs."""
