// SPDX-License-Identifier: Apache-2.0
// weft::Future, weft::Promise, weft::when_all.
#pragma once

#include <weft/engine/future/future.h>
#include <weft/engine/future/when_all.h>
