/* The sea-ice emulator for programs in C and, by ufs_emulator.f90, in Fortran.
 *
 * Arrays are those of an ice model: a field after another, each with one number per column of the
 * grid, in float64 and the units that ufs_name tells. In Fortran: inputs(num_columns, num_inputs).
 *
 * Functions return UFS_OK or another status, with a message of one line that ends in a zero byte and
 * is cut to `length` bytes; `message` may be null. No exception leaves them, and arrays are written
 * only if all is well. Floating-point traps of the caller are off while they work, and its flags are
 * as before afterwards.
 *
 * Threads: several may call ufs_predict, ufs_jacobian and ufs_name with one emulator at once, each
 * with its own arrays. ufs_free must come last. LibTorch itself computes large batches with several
 * threads: OMP_NUM_THREADS=1 where each core has a task of MPI. */
#ifndef UFS_EMULATOR_H
#define UFS_EMULATOR_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ufs_emulator ufs_emulator;

enum ufs_status {
    UFS_OK = 0,
    UFS_BAD_MODEL = 1,    /* the file is not there, or is no emulator */
    UFS_BAD_ARGUMENT = 2, /* a null pointer, a size or a number that cannot be */
    UFS_BAD_VALUE = 3,    /* an input is not finite, or not plausible: another unit? */
    UFS_FAILED = 4        /* LibTorch has failed, or there is no memory */
};

enum ufs_kind { UFS_INPUT = 0, UFS_INPUT_UNIT = 1, UFS_OUTPUT = 2, UFS_OUTPUT_UNIT = 3 };

/* Loads emulator.ts; `*emulator` is null if that fails. */
int ufs_load(const char *path, ufs_emulator **emulator, char *message, int64_t length);

/* Gives back what ufs_load made; null is fine. */
void ufs_free(ufs_emulator *emulator);

/* How many inputs and outputs there are; 0 of null. */
int64_t ufs_num_inputs(const ufs_emulator *emulator);
int64_t ufs_num_outputs(const ufs_emulator *emulator);

/* The name or the unit of an input or output, from number 0, into `message`. */
int ufs_name(const ufs_emulator *emulator, int kind, int64_t number, char *message, int64_t length);

/* outputs[o * num_columns + c] from inputs[i * num_columns + c]. Inputs that are a little out of
 * range, as rounding and interpolation make them, are taken for its end, as in training; their
 * number is put into `*num_clipped`, which may be null. */
int ufs_predict(const ufs_emulator *emulator, int64_t num_columns, const double *inputs,
                double *outputs, int64_t *num_clipped, char *message, int64_t length);

/* jacobian[(o * num_inputs + i) * num_columns + c], the change of an output with an input, in
 * Fortran jacobian(num_columns, num_inputs, num_outputs); `outputs` as above, or null. */
int ufs_jacobian(const ufs_emulator *emulator, int64_t num_columns, const double *inputs,
                 double *outputs, double *jacobian, int64_t *num_clipped, char *message,
                 int64_t length);

#ifdef __cplusplus
}
#endif

#endif
