#include <cstdlib>

#include <weft/base/instruments.h>

namespace weft {

Instruments Instruments::from(const std::function<const char*(const char*)>& variable) {
  const auto text = [&](const char* name) {
    const char* value = variable(name);
    return std::string(value == nullptr ? "" : value);
  };
  return {text("WEFT_DUMP_DIR"), text("WEFT_METRICS"), text("WEFT_STATUS_FILE")};
}

const Instruments& Instruments::wanted() {
  static const Instruments read = Instruments::from([](const char* name) { return std::getenv(name); });
  return read;
}

}  // namespace weft
