// SPDX-License-Identifier: Apache-2.0
#include <type_traits>

#include <dlfcn.h>

#include <weft/transport/mpi/library.h>

namespace weft::transport::mpi {

namespace {

Blame blame_of(int error_class) {
  switch (error_class) {
    case MPI_ERR_BUFFER:
    case MPI_ERR_COUNT:
    case MPI_ERR_TYPE:
    case MPI_ERR_TAG:
    case MPI_ERR_COMM:
    case MPI_ERR_RANK:
    case MPI_ERR_REQUEST:
    case MPI_ERR_ROOT:
    case MPI_ERR_GROUP:
    case MPI_ERR_OP:
    case MPI_ERR_ARG:
    case MPI_ERR_TRUNCATE: return Blame::Caller;
    case MPI_ERR_NO_MEM: return Blame::Busy;
    default: return Blame::PeerLost;
  }
}

// Fills the table. Returns the name of the first symbol that the library lacks; null if it has all.
const char* fill(Library& library, void* opened) {
  const char* missing = nullptr;
  const auto resolve = [&](auto& slot, const char* symbol) {
    slot = reinterpret_cast<std::remove_reference_t<decltype(slot)>>(dlsym(opened, symbol));
    if (slot == nullptr && missing == nullptr) missing = symbol;
  };
#define WEFT_MPI_RESOLVE(member, symbol) resolve(library.member, #symbol);
  WEFT_MPI_FUNCTIONS(WEFT_MPI_RESOLVE)
#undef WEFT_MPI_RESOLVE
  // mpi.h's MPI_COMM_WORLD, MPI_BYTE and MPI_ERRORS_RETURN.
  resolve(library.comm_world, "ompi_mpi_comm_world");
  resolve(library.byte, "ompi_mpi_byte");
  resolve(library.errors_return, "ompi_mpi_errors_return");
  library.query_cuda_support =
      reinterpret_cast<int (*)()>(dlsym(opened, "MPIX_Query_cuda_support"));
  return missing;
}

}  // namespace

Result<std::shared_ptr<const Library>> Library::open(const char* file) {
  const std::string name = file;
  // Never closed, because Open MPI has threads of its own. RTLD_GLOBAL, because its plugins look up
  // its symbols in the program.
  void* const opened = dlopen(file, RTLD_NOW | RTLD_GLOBAL);
  if (opened == nullptr) {
    std::string why = dlerror();
    if (why.starts_with(name + ": ")) why.erase(0, name.size() + 2);
    return Error(Blame::Unsupported,
                 "no " + name + ": " + why + "; install Open MPI (openmpi-bin)");
  }
  auto library = std::make_shared<Library>();
  if (const char* const missing = fill(*library, opened)) {
    return Error(Blame::Unsupported,
                 name + " has no " + missing + "; Weft needs Open MPI 4 or newer");
  }
  return std::shared_ptr<const Library>(std::move(library));
}

std::string Library::version() const {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  int bytes = 0;
  if (get_library_version(text, &bytes) != MPI_SUCCESS) return "an MPI of unknown version";
  const std::string whole(text, static_cast<std::size_t>(bytes));
  return whole.substr(0, whole.find(','));
}

std::string Library::why_no_device_memory() const {
  return version() +
         (is_cuda_aware() ? " is CUDA-aware, but knows nothing of streams"
                          : " was built without CUDA") +
         "; stage it (transport/staged/staged_communicator.h)";
}

Error error_of(const Library& library, int code, std::string_view what, Place place) {
  char text[MPI_MAX_ERROR_STRING] = {};
  int bytes = 0;
  int error_class = MPI_ERR_UNKNOWN;
  library.error_class(code, &error_class);
  std::string whole(what);
  whole += ": ";
  if (library.error_string(code, text, &bytes) == MPI_SUCCESS) {
    whole.append(text, static_cast<std::size_t>(bytes));
  } else {
    whole += "MPI error " + std::to_string(code);
  }
  return {blame_of(error_class), whole, code, place};
}

}  // namespace weft::transport::mpi
