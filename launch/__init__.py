"""The whole suite as local processes: started, shown, restarted where one dies, ended."""
