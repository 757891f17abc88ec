"""The whole suite as local processes: started, shown, started again where one dies, ended."""
