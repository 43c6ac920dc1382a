// SPDX-License-Identifier: Apache-2.0
// Every function of Open MPI that Weft uses, in one table that dlopen fills, as cuda/driver.h does
// for the driver. So a program built with MPI starts on a machine without it. mpi.h is used for
// types only; its handles are addresses inside Open MPI's own library, so no other MPI works.
//
// A Library is immutable and usable from every thread.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#define OMPI_SKIP_MPICXX 1
#include <mpi.h>

#include <weft/base/error.h>
#include <weft/base/result.h>

namespace weft::transport::mpi {

// function(member, symbol)
// clang-format off
#define WEFT_MPI_FUNCTIONS(function)                     \
  function(initialized, MPI_Initialized)                 \
  function(finalized, MPI_Finalized)                     \
  function(init_thread, MPI_Init_thread)                 \
  function(query_thread, MPI_Query_thread)               \
  function(finalize, MPI_Finalize)                       \
  function(error_class, MPI_Error_class)                 \
  function(error_string, MPI_Error_string)               \
  function(get_library_version, MPI_Get_library_version) \
  function(comm_rank, MPI_Comm_rank)                     \
  function(comm_size, MPI_Comm_size)                     \
  function(comm_group, MPI_Comm_group)                   \
  function(comm_create_group, MPI_Comm_create_group)     \
  function(comm_free, MPI_Comm_free)                     \
  function(comm_set_errhandler, MPI_Comm_set_errhandler) \
  function(comm_get_attr, MPI_Comm_get_attr)             \
  function(group_incl, MPI_Group_incl)                   \
  function(group_free, MPI_Group_free)                   \
  function(type_contiguous, MPI_Type_contiguous)         \
  function(type_commit, MPI_Type_commit)                 \
  function(op_create, MPI_Op_create)                     \
  function(testsome, MPI_Testsome)                       \
  function(get_count, MPI_Get_count)                     \
  function(ibcast, MPI_Ibcast)                           \
  function(iallreduce, MPI_Iallreduce)                   \
  function(ireduce, MPI_Ireduce)                         \
  function(iallgather, MPI_Iallgather)                   \
  function(igather, MPI_Igather)                         \
  function(iscatter, MPI_Iscatter)                       \
  function(ireduce_scatter, MPI_Ireduce_scatter)         \
  function(ialltoallv, MPI_Ialltoallv)                   \
  function(ibarrier, MPI_Ibarrier)                       \
  function(isend, MPI_Isend)                             \
  function(irecv, MPI_Irecv)
// clang-format on

struct Library {
#define WEFT_MPI_MEMBER(member, symbol) decltype(&::symbol) member = nullptr;
  // Null if this Open MPI was built without the extension.
  WEFT_MPI_FUNCTIONS(WEFT_MPI_MEMBER)
#undef WEFT_MPI_MEMBER
  int (*query_cuda_support)() = nullptr;
  MPI_Comm comm_world = nullptr;
  MPI_Datatype byte = nullptr;
  MPI_Errhandler errors_return = nullptr;

  // Opens the library; does not start MPI. Returns Unsupported, with the reason, if it cannot be
  // used.
  static Result<std::shared_ptr<const Library>> open(const char* file = "libmpi.so.40");

  // "Open MPI v4.1.4"
  std::string version() const;
  bool is_cuda_aware() const { return query_cuda_support != nullptr && query_cuda_support() == 1; }
  // Why Weft does not give GPU memory to MPI, CUDA-aware or not.
  std::string why_no_device_memory() const;
};

// Makes an error such as "what: MPI_ERR_TRUNCATE: message truncated", with the code as
// native_code(). Blame is Caller for invalid arguments, Busy for lack of memory, PeerLost for all
// others: MPI ends a job with its first lost rank.
Error error_of(const Library& library, int code, std::string_view what,
               Place place = Place::current());

// Throws error_of() unless the call succeeded.
inline void check(const Library& library, int code, std::string_view what,
                  Place place = Place::current()) {
  if (code != MPI_SUCCESS) throw error_of(library, code, what, place);
}

}  // namespace weft::transport::mpi
