"""The `fusionrag` command. One file a group of subcommands."""
