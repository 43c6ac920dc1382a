// Which backend carries which device: ProcessGroupOptions::backend, read.
#pragma once

#include <map>
#include <string>

#include <c10/core/DeviceType.h>

namespace weft::group {

// "cpu:gloo,cuda:nccl" as {device type: backend}; one name stands for both devices, nothing for that default. Case and
// blanks do not matter. Throws Caller for a trailing comma, a device named twice, an unknown device.
std::map<c10::DeviceType, std::string> parse_backends(const std::string& text);
// Whether the text leaves the choice to Weft, which then makes do without what cannot be used here.
bool is_default_backend(const std::string& text);

}  // namespace weft::group
