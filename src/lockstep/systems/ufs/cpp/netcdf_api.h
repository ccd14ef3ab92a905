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
int nc_inq_vartype(int file, int variable, int *type);
int nc_inq_var_chunking(int file, int variable, int *storage, std::size_t *sizes);
int nc_inq_dimname(int file, int dim, char *name);
int nc_inq_dimlen(int file, int dim, std::size_t *length);
int nc_inq_att(int file, int variable, const char *name, int *type, std::size_t *length);
int nc_get_att_double(int file, int variable, const char *name, double *values);
int nc_get_att_text(int file, int variable, const char *name, char *text);
int nc_get_att_string(int file, int variable, const char *name, char **texts);
int nc_free_string(std::size_t count, char **texts);
int nc_get_vara_double(int file, int variable, const std::size_t *start, const std::size_t *count,
                       double *values);
const char *nc_strerror(int code);
}

// Numbers of the library's types, as nc_inq_vartype gives them.
enum NcType {
    kNcByte = 1, kNcChar, kNcShort, kNcInt, kNcFloat, kNcDouble, kNcUbyte, kNcUshort, kNcUint,
    kNcInt64, kNcUint64, kNcString,
};
