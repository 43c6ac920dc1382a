// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <string_view>
#include <type_traits>

#include <link.h>

#include <dlfcn.h>

#include <weft/transport/nccl/library.h>

namespace weft::transport::nccl {

namespace {

constexpr const char* kName = "libnccl.so.2";

// The inverse of NCCL_VERSION. Up to 2.8 the code has one digit less after the major number.
std::string version_text(int code) {
  const int major = code < 10000 ? code / 1000 : code / 10000;
  const int rest = code < 10000 ? code % 1000 : code % 10000;
  return std::to_string(major) + "." + std::to_string(rest / 100) + "." +
         std::to_string(rest % 100);
}

// "2.14": without the patch number, as a release's first patch may have any number.
std::string release_text(int code) {
  const std::string text = version_text(code);
  return text.substr(0, text.rfind('.'));
}

Blame blame_of(ncclResult_t result) {
  switch (result) {
    case ncclInvalidArgument:
    case ncclInvalidUsage: return Blame::Caller;
    case ncclSystemError:  // mostly a socket
    case ncclRemoteError: return Blame::PeerLost;
    default: return Blame::Device;
  }
}

void fill(Library& library, void* opened) {
  const auto resolve = [opened](auto& slot, const char* symbol) {
    slot = reinterpret_cast<std::remove_reference_t<decltype(slot)>>(dlsym(opened, symbol));
  };
#define WEFT_NCCL_RESOLVE(member, symbol, since) resolve(library.member, #symbol);
  WEFT_NCCL_FUNCTIONS(WEFT_NCCL_RESOLVE)
#undef WEFT_NCCL_RESOLVE
}

// Why the library cannot be used; empty if it can. Checks the version first, because an old library
// lacks functions too.
std::optional<Error> why_not(const Library& library) {
  if (auto error = library.lacks(&Library::get_version)) return error;
  if (auto error = library.too_old()) return error;
#define WEFT_NCCL_REQUIRE(member, symbol, since)                    \
  if constexpr (since <= kOldest) {                                 \
    if (auto error = library.lacks(&Library::member)) return error; \
  }
  WEFT_NCCL_FUNCTIONS(WEFT_NCCL_REQUIRE)
#undef WEFT_NCCL_REQUIRE
  return std::nullopt;
}

// Adds the place where pip installs NCCL beside a torch wheel, if `object` is that wheel's
// libtorch. For dl_iterate_phdr.
int add_beside_libtorch(dl_phdr_info* object, std::size_t, void* places) {
  constexpr std::string_view kLibtorch = "/torch/lib/libtorch_cpu.so";
  const std::string_view path = object->dlpi_name;
  if (!path.ends_with(kLibtorch)) return 0;
  const std::string folder(path.substr(0, path.size() - kLibtorch.size()));
  static_cast<std::vector<std::string>*>(places)->push_back(folder + "/nvidia/nccl/lib/" + kName);
  return 1;  // ends the iteration
}

}  // namespace

std::vector<std::string> Library::candidates() {
  std::vector<std::string> places{kName};
  ::dl_iterate_phdr(add_beside_libtorch, &places);
  return places;
}

Result<std::shared_ptr<const Library>> Library::open(const std::vector<std::string>& files) {
  // NCCL reads these variables once. The first makes NCCL connect all algorithms when it creates a
  // communicator and not at their first use: connecting allocates, which may wait for a device
  // while its streams wait for us. The second makes operations of several communicators on one
  // device start in the order in which they were issued; otherwise two ranks could each wait for
  // the other's second one.
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
      fill(*library, opened);
      const auto refused = why_not(*library);
      // Never closed once it is in use, because NCCL has threads of its own.
      if (!refused) return std::shared_ptr<const Library>(std::move(library));
      why = refused->text();
      dlclose(opened);
    }
    reasons += (reasons.empty() ? "" : "; ") + file + ": " + why;
  }
  return Error(Blame::Unsupported, "no " + std::string(kName) + " that can be used: " + reasons +
                                       "; install NCCL " + release_text(kOldest) +
                                       " or newer: the wheel nvidia-nccl-cu13 has one");
}

std::string Library::version() const {
  int code = 0;
  return get_version(&code) == ncclSuccess ? version_text(code) : "of an unknown version";
}

std::optional<Error> Library::too_old() const {
  int code = 0;
  if (get_version(&code) == ncclSuccess && code >= kOldest) return std::nullopt;
  return Error(Blame::Unsupported, "NCCL " + version() + " is too old; Weft needs " +
                                       release_text(kOldest) + " or newer");
}

Error Library::lacking(const char* symbol, int since) const {
  const std::string whose = get_version != nullptr ? "NCCL " + version() : "it";
  return {Blame::Unsupported,
          whose + " has no " + symbol + ", which came with NCCL " + release_text(since)};
}

Error error_of(const Library& library, ncclResult_t result, std::string_view what, Place place) {
  std::string text(what);
  text += std::string(": ") + library.get_error_string(result) + " (ncclResult_t " +
          std::to_string(result) + ")";
  // There is one last error per process, so it may belong to another communicator; but it is often
  // the only text with the reason.
  const char* const last = library.get_last_error(nullptr);
  if (last != nullptr && *last != '\0') text += ": " + std::string(last);
  while (text.ends_with('\n')) text.pop_back();
  return {blame_of(result), text, static_cast<int>(result), place};
}

}  // namespace weft::transport::nccl
