// The few functions of the netCDF C library that are used here, for machines that have the library
// (Python's netCDF4 package brings it along) but not its headers.
#pragma once

#include <cstddef>

extern "C" {
int nc_open(const char *path, int mode, int *file);
int nc_close(int file);
int nc_inq_varid(int file, const char *name, int *variable);
int nc_inq_varndims(int file, int variable, int *count);
int nc_inq_vardimid(int file, int variable, int *dims);
int nc_inq_dimlen(int file, int dim, std::size_t *length);
int nc_get_var_double(int file, int variable, double *values);
const char *nc_strerror(int code);
}
