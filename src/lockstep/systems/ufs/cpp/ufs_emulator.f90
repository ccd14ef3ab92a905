! The sea-ice emulator for models in Fortran; see ufs_emulator.h for what holds of all calls.
module ufs_emulator
  use, intrinsic :: iso_c_binding
  use, intrinsic :: iso_fortran_env, only: int64, real64
  implicit none
  private

  integer, parameter, public :: ufs_ok = 0, ufs_bad_model = 1, ufs_bad_argument = 2, &
                                ufs_bad_value = 3, ufs_failed = 4
  integer, parameter, public :: ufs_input = 0, ufs_input_unit = 1, ufs_output = 2, &
                                ufs_output_unit = 3
  integer, parameter, public :: ufs_message_length = 512

  ! An emulator that has been loaded. Copies stand for the same one: free it once.
  type, public :: ufs_emulator_type
    private
    type(c_ptr) :: handle = c_null_ptr
  end type ufs_emulator_type

  public :: ufs_load, ufs_free, ufs_num_inputs, ufs_num_outputs, ufs_name, ufs_predict, ufs_jacobian

  interface
    integer(c_int) function c_load(path, handle, message, length) bind(c, name="ufs_load")
      import
      character(kind=c_char), intent(in) :: path(*)
      type(c_ptr), intent(out) :: handle
      character(kind=c_char), intent(out) :: message(*)
      integer(c_int64_t), value :: length
    end function c_load

    subroutine c_free(handle) bind(c, name="ufs_free")
      import
      type(c_ptr), value :: handle
    end subroutine c_free

    integer(c_int64_t) function c_num_inputs(handle) bind(c, name="ufs_num_inputs")
      import
      type(c_ptr), value :: handle
    end function c_num_inputs

    integer(c_int64_t) function c_num_outputs(handle) bind(c, name="ufs_num_outputs")
      import
      type(c_ptr), value :: handle
    end function c_num_outputs

    integer(c_int) function c_name(handle, kind, number, message, length) bind(c, name="ufs_name")
      import
      type(c_ptr), value :: handle
      integer(c_int), value :: kind
      integer(c_int64_t), value :: number, length
      character(kind=c_char), intent(out) :: message(*)
    end function c_name

    integer(c_int) function c_predict(handle, num_columns, inputs, outputs, num_clipped, message, &
                                      length) bind(c, name="ufs_predict")
      import
      type(c_ptr), value :: handle
      integer(c_int64_t), value :: num_columns, length
      real(c_double), intent(in) :: inputs(*)
      real(c_double), intent(inout) :: outputs(*)
      integer(c_int64_t), intent(inout) :: num_clipped
      character(kind=c_char), intent(out) :: message(*)
    end function c_predict

    integer(c_int) function c_jacobian(handle, num_columns, inputs, outputs, jacobian, num_clipped, &
                                       message, length) bind(c, name="ufs_jacobian")
      import
      type(c_ptr), value :: handle
      integer(c_int64_t), value :: num_columns, length
      real(c_double), intent(in) :: inputs(*)
      real(c_double), intent(inout) :: outputs(*), jacobian(*)
      integer(c_int64_t), intent(inout) :: num_clipped
      character(kind=c_char), intent(out) :: message(*)
    end function c_jacobian
  end interface

contains

  ! Load emulator.ts; `status` is ufs_ok, or `message` says what is wrong.
  subroutine ufs_load(path, emulator, status, message)
    character(len=*), intent(in) :: path
    type(ufs_emulator_type), intent(out) :: emulator
    integer, intent(out) :: status
    character(len=*), intent(out) :: message
    character(kind=c_char) :: said(ufs_message_length)

    status = c_load(trim(path)//c_null_char, emulator%handle, said, size(said, kind=c_int64_t))
    message = text(said)
  end subroutine ufs_load

  ! Give an emulator back; one that is not loaded is left alone.
  subroutine ufs_free(emulator)
    type(ufs_emulator_type), intent(inout) :: emulator

    call c_free(emulator%handle)
    emulator%handle = c_null_ptr
  end subroutine ufs_free

  integer function ufs_num_inputs(emulator)
    type(ufs_emulator_type), intent(in) :: emulator

    ufs_num_inputs = int(c_num_inputs(emulator%handle))
  end function ufs_num_inputs

  integer function ufs_num_outputs(emulator)
    type(ufs_emulator_type), intent(in) :: emulator

    ufs_num_outputs = int(c_num_outputs(emulator%handle))
  end function ufs_num_outputs

  ! Name or unit (`kind`, such as ufs_input_unit) of an input or output, from number 1; empty if
  ! there is no such one.
  function ufs_name(emulator, kind, number) result(name)
    type(ufs_emulator_type), intent(in) :: emulator
    integer, intent(in) :: kind, number
    character(len=:), allocatable :: name
    character(kind=c_char) :: said(ufs_message_length)

    name = ""
    if (c_name(emulator%handle, int(kind, c_int), int(number - 1, c_int64_t), said, &
               size(said, kind=c_int64_t)) == ufs_ok) name = text(said)
  end function ufs_name

  ! outputs(column, output) from inputs(column, input). Slices of larger arrays are fine.
  subroutine ufs_predict(emulator, inputs, outputs, status, message, num_clipped)
    type(ufs_emulator_type), intent(in) :: emulator
    real(real64), intent(in) :: inputs(:, :)
    real(real64), intent(inout) :: outputs(:, :)
    integer, intent(out) :: status
    character(len=*), intent(out) :: message
    integer(int64), intent(out), optional :: num_clipped
    character(kind=c_char) :: said(ufs_message_length)
    integer(int64) :: clipped

    clipped = 0
    if (present(num_clipped)) num_clipped = 0
    call check(emulator, shape(inputs), shape(outputs), status, message)
    if (status /= ufs_ok) return
    status = c_predict(emulator%handle, size(inputs, 1, c_int64_t), inputs, outputs, clipped, said, &
                       size(said, kind=c_int64_t))
    message = text(said)
    if (present(num_clipped)) num_clipped = clipped
  end subroutine ufs_predict

  ! The same with jacobian(column, input, output), the change of each output with each input.
  subroutine ufs_jacobian(emulator, inputs, outputs, jacobian, status, message, num_clipped)
    type(ufs_emulator_type), intent(in) :: emulator
    real(real64), intent(in) :: inputs(:, :)
    real(real64), intent(inout) :: outputs(:, :), jacobian(:, :, :)
    integer, intent(out) :: status
    character(len=*), intent(out) :: message
    integer(int64), intent(out), optional :: num_clipped
    character(kind=c_char) :: said(ufs_message_length)
    integer(int64) :: clipped

    clipped = 0
    if (present(num_clipped)) num_clipped = 0
    call check(emulator, shape(inputs), shape(outputs), status, message)
    if (status /= ufs_ok) return
    if (any(shape(jacobian) /= [shape(inputs), size(outputs, 2)])) then
      status = ufs_bad_argument
      message = "jacobian: must be (columns, inputs, outputs)"
      return
    end if
    status = c_jacobian(emulator%handle, size(inputs, 1, c_int64_t), inputs, outputs, jacobian, &
                        clipped, said, size(said, kind=c_int64_t))
    message = text(said)
    if (present(num_clipped)) num_clipped = clipped
  end subroutine ufs_jacobian

  subroutine check(emulator, of_inputs, of_outputs, status, message)
    type(ufs_emulator_type), intent(in) :: emulator
    integer, intent(in) :: of_inputs(2), of_outputs(2)
    integer, intent(out) :: status
    character(len=*), intent(out) :: message

    status = ufs_bad_argument
    message = ""
    if (.not. c_associated(emulator%handle)) then
      message = "emulator: is not loaded"
    else if (of_inputs(2) /= ufs_num_inputs(emulator)) then
      message = "inputs: must be (columns, inputs), with as many inputs as the emulator has"
    else if (of_outputs(1) /= of_inputs(1) .or. of_outputs(2) /= ufs_num_outputs(emulator)) then
      message = "outputs: must be (columns, outputs), with as many columns as inputs"
    else
      status = ufs_ok
    end if
  end subroutine check

  ! A text of C, which ends in a zero.
  function text(said) result(found)
    character(kind=c_char), intent(in) :: said(:)
    character(len=:), allocatable :: found
    integer :: i

    found = ""
    do i = 1, size(said)
      if (said(i) == c_null_char) exit
      found = found//said(i)
    end do
  end function text

end module ufs_emulator
