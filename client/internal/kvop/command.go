package kvop

import (
	"jbofd/client/internal/host"
	"jbofd/internal/nvme"
)

// SetStore makes c a Store. It and the other setters do not change c.Tag.
//
// Cost: 0 allocs.
func SetStore(c *host.Command, nsid uint32, key, value []byte, options uint8) { // hot: 0 allocs
	set(c, nvme.CmdKVStore, nsid, key, value)
	c.SQE.KV().SetOptions(options)
}

// SetRetrieve makes c a Retrieve into dst.
func SetRetrieve(c *host.Command, nsid uint32, key, dst []byte) { // hot: 0 allocs
	set(c, nvme.CmdKVRetrieve, nsid, key, dst)
}

// SetDelete makes c a Delete.
func SetDelete(c *host.Command, nsid uint32, key []byte) { set(c, nvme.CmdKVDelete, nsid, key, nil) } // hot: 0 allocs

// SetExist makes c an Exist.
func SetExist(c *host.Command, nsid uint32, key []byte) { set(c, nvme.CmdKVExist, nsid, key, nil) } // hot: 0 allocs

// SetList makes c a List into dst, which begins with key.
func SetList(c *host.Command, nsid uint32, key, dst []byte) { set(c, nvme.CmdKVList, nsid, key, dst) } // hot: 0 allocs

func set(c *host.Command, opcode uint8, nsid uint32, key, data []byte) { // hot: 0 allocs
	c.SQE = nvme.SQE{}
	c.SQE.SetOpcode(opcode)
	c.SQE.SetNSID(nsid)
	k := c.SQE.KV()
	k.SetKey(key)
	k.SetLenBytes(uint32(len(data)))
	c.Data = data
}
