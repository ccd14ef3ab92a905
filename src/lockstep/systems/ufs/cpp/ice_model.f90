! How an ice model calls the emulator: with its own fields, those of a block's ocean columns at a time.
!
!   ice_model emulator.ts rows.txt
!
! The file has, in its first line, the number of columns; then for each its inputs, in the order and
! the units that the emulator asks for. Outputs and Jacobians are printed for each column.
program ice_model
  use, intrinsic :: iso_fortran_env, only: error_unit, int64, real64
  use ufs_emulator
  implicit none

  type(ufs_emulator_type) :: emulator
  real(real64), allocatable :: fields(:, :), outputs(:, :), jacobian(:, :, :)
  character(len=4096) :: path, rows
  character(len=ufs_message_length) :: message
  integer :: status, unit, num_columns, column, i, o
  integer(int64) :: num_clipped

  if (command_argument_count() /= 2) then
    write (error_unit, "(a)") "usage: ice_model emulator.ts rows.txt"
    stop 1, quiet=.true.
  end if
  call get_command_argument(1, path)
  call get_command_argument(2, rows)
  call ufs_load(path, emulator, status, message)
  call stop_if_bad()
  do i = 1, ufs_num_inputs(emulator)
    print "(4a)", "input ", ufs_name(emulator, ufs_input, i), " ", &
      ufs_name(emulator, ufs_input_unit, i)
  end do

  open (newunit=unit, file=trim(rows), status="old", action="read", iostat=status, iomsg=message)
  call stop_if_bad()
  read (unit, *, iostat=status, iomsg=message) num_columns
  call stop_if_bad()
  ! As in a model: one array for each field, so a column's inputs are a stride apart.
  allocate (fields(num_columns, ufs_num_inputs(emulator)))
  allocate (outputs(num_columns, ufs_num_outputs(emulator)))
  allocate (jacobian(num_columns, ufs_num_inputs(emulator), ufs_num_outputs(emulator)))
  do column = 1, num_columns
    read (unit, *, iostat=status, iomsg=message) fields(column, :)
    call stop_if_bad()
  end do
  close (unit)

  call ufs_jacobian(emulator, fields, outputs, jacobian, status, message, num_clipped)
  call stop_if_bad()
  if (num_clipped > 0) print "(a, i0)", "clipped ", num_clipped
  do column = 1, num_columns
    do o = 1, ufs_num_outputs(emulator)
      print "(a, i0, 3a, es24.16)", "column ", column, " ", &
        ufs_name(emulator, ufs_output, o), " =", outputs(column, o)
      do i = 1, ufs_num_inputs(emulator)
        print "(4a, es24.16)", "  d ", ufs_name(emulator, ufs_output, o), " / d ", &
          ufs_name(emulator, ufs_input, i)//" =", jacobian(column, i, o)
      end do
    end do
  end do
  call ufs_free(emulator)

contains

  subroutine stop_if_bad()
    if (status == ufs_ok) return
    write (error_unit, "(2a)") "error: ", trim(message)
    call ufs_free(emulator)
    stop 2, quiet=.true.
  end subroutine stop_if_bad

end program ice_model
