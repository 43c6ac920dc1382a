// Which backend carries which device: ProcessGroupOptions::backend, read.
#pragma once

#include <map>
#include <string>

#include <c10/core/DeviceType.h>

namespace weft::group {

// Carries host memory by default where "weft" cannot be used.
constexpr const char* kFallbackBackend = "gloo";

// "cpu:weft,cuda:nccl" as {device type: backend}; one name stands for both devices, and an empty
// text for that default. Case and blanks do not matter. Throws Caller for a trailing comma, a
// device named twice, an unknown device.
std::map<c10::DeviceType, std::string> parse_backends(const std::string& text);
// Whether the text leaves the choice to Weft, which then does without a backend that cannot be used
// on this machine.
bool is_default_backend(const std::string& text);
// Returns the text that the program gave, or the value of WEFT_BACKEND where the program leaves the
// choice open. Throws Caller, naming the variable, where its value cannot be parsed.
std::string backends_of(const std::string& given);

}  // namespace weft::group
