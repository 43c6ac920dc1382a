// Every function of Open MPI that Weft uses, in one table filled by dlopen, as cuda/driver.h does
// for the driver: a program built with MPI starts on a machine without it. mpi.h gives types only;
// its handles are addresses inside Open MPI's own library, so no other MPI fits.
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
  WEFT_MPI_FUNCTIONS(WEFT_MPI_MEMBER)
#undef WEFT_MPI_MEMBER
  int (*query_cuda_support)() =
      nullptr;  // null where this Open MPI was built without the extension
  MPI_Comm comm_world = nullptr;
  MPI_Datatype byte = nullptr;
  MPI_Errhandler errors_return = nullptr;

  // Where it cannot be used: Unsupported, with the reason. Starts nothing.
  static Result<std::shared_ptr<const Library>> open(const char* file = "libmpi.so.40");

  // "Open MPI v4.1.4"
  std::string version() const;
  bool is_cuda_aware() const { return query_cuda_support != nullptr && query_cuda_support() == 1; }
  // Why memory of a GPU is not handed to MPI, whether or not it would take it.
  std::string why_no_device_memory() const;
};

// "what: MPI_ERR_TRUNCATE: message truncated", with the code as native_code(). What MPI refuses is
// Caller, no memory Busy, the rest PeerLost: MPI ends a job with its first lost rank.
Error error_of(const Library& library, int code, std::string_view what,
               Place place = Place::current());

// Throws that unless the call succeeded.
inline void check(const Library& library, int code, std::string_view what,
                  Place place = Place::current()) {
  if (code != MPI_SUCCESS) throw error_of(library, code, what, place);
}

}  // namespace weft::transport::mpi
