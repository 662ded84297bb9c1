"""Analysis and rewriting of Dynamo graphs."""
