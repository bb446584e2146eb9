"""The command line: one file a verb, and nothing imported before its verb runs."""
