// SPDX-License-Identifier: Apache-2.0
// Collectives of values: weft::all_gather_object and others.
#pragma once

#include <weft/engine/group/objects.h>
#include <weft/group.h>
