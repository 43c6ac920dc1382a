// SPDX-License-Identifier: Apache-2.0
#include <type_traits>

#include <dlfcn.h>

#include <weft/transport/verbs/library.h>

namespace weft::transport::verbs {

Result<std::shared_ptr<const Library>> Library::open(const char* file) {
  // Never closed once it is in use, because it keeps its list of devices and has loaded driver
  // libraries of its own.
  void* const opened = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) {
    return Error(Blame::Unsupported,
                 std::string("libibverbs cannot be opened: ") + dlerror() +
                     "; install rdma-core (Debian: libibverbs1 and ibverbs-providers)");
  }
  auto library = std::make_shared<Library>();
  std::string missing;
  const auto resolve = [&](auto& slot, const char* symbol) {
    slot = reinterpret_cast<std::remove_reference_t<decltype(slot)>>(dlsym(opened, symbol));
    if (slot == nullptr && missing.empty()) missing = symbol;
  };
#define WEFT_VERBS_RESOLVE(member, symbol) resolve(library->member, #symbol);
  WEFT_VERBS_FUNCTIONS(WEFT_VERBS_RESOLVE)
#undef WEFT_VERBS_RESOLVE
  if (!missing.empty()) {
    dlclose(opened);
    return Error(Blame::Unsupported, std::string(file) + " has no " + missing +
                                         ": it is older than rdma-core 32; install a newer one");
  }
  library->reg_dmabuf_mr =
      reinterpret_cast<decltype(library->reg_dmabuf_mr)>(dlsym(opened, "ibv_reg_dmabuf_mr"));
  return std::shared_ptr<const Library>(std::move(library));
}

}  // namespace weft::transport::verbs
