#include <cstdlib>
#include <type_traits>

#include <dlfcn.h>

#include <weft/transport/nccl/library.h>

namespace weft::transport::nccl {

namespace {

constexpr const char* kName = "libnccl.so.2";

// NCCL_LAUNCH_ORDER_IMPLICIT, without which two communicators on one device may wait for each other, came with 2.26.
constexpr int kOldest = NCCL_VERSION(2, 26, 0);

std::string version_text(int code) {
  return std::to_string(code / 10000) + "." + std::to_string(code % 10000 / 100) + "." + std::to_string(code % 100);
}

Blame blame_of(ncclResult_t result) {
  switch (result) {
    case ncclInvalidArgument:
    case ncclInvalidUsage: return Blame::Caller;
    case ncclSystemError:  // a socket, mostly
    case ncclRemoteError: return Blame::PeerLost;
    default: return Blame::Device;
  }
}

// The name of the first function that the library lacks; null if it has all of them.
const char* fill(Library& library, void* opened) {
  const char* missing = nullptr;
  const auto resolve = [&](auto& slot, const char* symbol) {
    slot = reinterpret_cast<std::remove_reference_t<decltype(slot)>>(dlsym(opened, symbol));
    if (slot == nullptr && missing == nullptr) missing = symbol;
  };
#define WEFT_NCCL_RESOLVE(member, symbol) resolve(library.member, #symbol);
  WEFT_NCCL_FUNCTIONS(WEFT_NCCL_RESOLVE)
#undef WEFT_NCCL_RESOLVE
  return missing;
}

}  // namespace

std::vector<std::string> Library::candidates() {
  // WEFT_NCCL_LIBRARY_DIR is set for this file by CMake.
  return {kName, std::string(WEFT_NCCL_LIBRARY_DIR) + "/" + kName};
}

Result<std::shared_ptr<const Library>> Library::open(const std::vector<std::string>& files) {
  // Read by NCCL once. Connections of all algorithms are made when a communicator is, not at their first use: making them
  // allocates, which may wait for a device whose streams wait for us. And operations of several communicators on one device
  // start in the order in which they were issued, or two ranks could each wait for the other's second one.
  setenv("NCCL_RUNTIME_CONNECT", "0", /*overwrite=*/0);
  setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", /*overwrite=*/0);
  std::string reasons;
  for (const std::string& file : files) {
    void* const opened = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    std::string why;
    if (opened == nullptr) {
      why = dlerror();
      if (why.starts_with(file + ": ")) why.erase(0, file.size() + 2);
    } else {
      auto library = std::make_shared<Library>();
      const char* const missing = fill(*library, opened);
      const auto old = missing == nullptr ? library->too_old() : std::nullopt;
      // Never closed once it is used: NCCL has threads of its own.
      if (missing == nullptr && !old) return std::shared_ptr<const Library>(std::move(library));
      why = missing != nullptr ? std::string("it has no ") + missing : old->text();
      dlclose(opened);
    }
    reasons += (reasons.empty() ? "" : "; ") + file + ": " + why;
  }
  return Error(Blame::Unsupported,
               "no " + std::string(kName) + " that can be used: " + reasons + "; the wheel nvidia-nccl-cu13 has one");
}

std::string Library::version() const {
  int code = 0;
  return get_version(&code) == ncclSuccess ? version_text(code) : "of an unknown version";
}

std::optional<Error> Library::too_old() const {
  int code = 0;
  if (get_version(&code) == ncclSuccess && code >= kOldest) return std::nullopt;
  return Error(Blame::Unsupported, "NCCL " + version() + " is too old; Weft needs " + version_text(kOldest) + " or newer");
}

Error error_of(const Library& library, ncclResult_t result, std::string_view what, Place place) {
  std::string text(what);
  text += std::string(": ") + library.get_error_string(result) + " (ncclResult_t " + std::to_string(result) + ")";
  // One per process, so it may belong to another communicator; it is often the only place that says why.
  const char* const last = library.get_last_error(nullptr);
  if (last != nullptr && *last != '\0') text += ": " + std::string(last);
  while (text.ends_with('\n')) text.pop_back();
  return {blame_of(result), text, static_cast<int>(result), place};
}

}  // namespace weft::transport::nccl
