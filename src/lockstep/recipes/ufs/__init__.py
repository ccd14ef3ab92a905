"""The sea-ice emulator: NetCDF fields in, ice concentration and its Jacobian out."""
