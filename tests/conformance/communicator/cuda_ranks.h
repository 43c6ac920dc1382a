// SPDX-License-Identifier: Apache-2.0
// A rank's GPU, real or fake: memory that is written and read through pinned copies, and gates that
// streams wait for.
#pragma once

#include <weft/base/result.h>
#include <weft/cuda/device.h>
#include <weft/cuda/driver.h>
#include <weft/tests/conformance/communicator/ranks.h>

namespace weft::conformance {

// The machine's driver, opened once for tests whose ranks or ends share a GPU. An error if there is
// no driver.
const Result<std::shared_ptr<const cuda::Driver>>& real_driver();

// Device memory of a stream-ordered pool, which other processes cannot open, or memory that they
// can.
enum class OnDevice { Pooled, Shareable };

// Gives the rank memory and gates on the device, and the streams and pools that these need.
void equip(Rank& rank, const std::shared_ptr<cuda::Device>& device,
           OnDevice kind = OnDevice::Pooled);

// Frees the memory that the rank has retired on the device; fails the test if something still
// refers to the device.
void reclaim(std::shared_ptr<cuda::Device> device);

}  // namespace weft::conformance
