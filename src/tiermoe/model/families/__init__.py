"""Model families: the table, and a file for each family that has a block which no other family has."""
