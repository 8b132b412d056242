"""Operations of a captured graph, by families: what each is for every reader of the graph."""
