# SPDX-License-Identifier: Apache-2.0
from sparge.compat.unserved import refuse

refuse(__name__)
